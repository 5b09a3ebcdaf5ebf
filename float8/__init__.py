"""float8 recipes; none yet."""

if __name__ == "float8":
    raise ImportError(
        "import dtron.float8: the folder float8/ is a package of dtron, not a top-level one"
    )
