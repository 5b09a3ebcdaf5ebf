"""float8 training: recipes, layers, communication, and what shows how accurate they are."""

if __name__ == "float8":
    raise ImportError(
        "import dtron.float8: the folder float8/ is a package of dtron, not a top-level one"
    )

from dtron.float8.convert import convert, layer_names
from dtron.float8.linear import Float8Linear, ScaleGroups
from dtron.float8.recipes import RECIPES, Recipe

__all__ = ["RECIPES", "Float8Linear", "Recipe", "ScaleGroups", "convert", "layer_names"]
