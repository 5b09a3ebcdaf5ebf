if __name__ == "parallelisms":
    raise ImportError("import dtron.parallelisms: the folder parallelisms/ is a package of dtron, not a top-level one")
