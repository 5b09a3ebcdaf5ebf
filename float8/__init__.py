"""float8 training: recipes, layers, communication, and statistics of their accuracy."""

if __name__ == "float8":
    raise ImportError("float8/ is not a top-level package; use import dtron.float8")

from dtron.float8.convert import convert, layer_names
from dtron.float8.linear import Float8Linear
from dtron.float8.recipes import RECIPES, Recipe
from dtron.float8.scales import ScaleGroups

__all__ = ["RECIPES", "Float8Linear", "Recipe", "ScaleGroups", "convert", "layer_names"]
