"""The rows of the paper's tables."""


def register():
    pass


def names():
    return []
