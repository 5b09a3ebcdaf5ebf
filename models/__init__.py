if __name__ == "models":
    raise ImportError("import dtron.models: the folder models/ is a package of dtron, not a top-level one")
