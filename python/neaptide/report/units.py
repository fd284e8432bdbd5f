"""Numbers as people read them, in the words of `neap`'s own tables."""

UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def unit_of(count):
    """(name, bytes) of the unit in which so many bytes are written."""
    return next((unit for unit in UNITS if abs(count) >= unit[1]), UNITS[-1])


def bytes_text(count):
    if count is None:
        return "–"
    name, size = unit_of(count)
    return f"{count} B" if size == 1 else f"{count / size:.2f} {name}"


def ms_text(value):
    if value is None:
        return "–"
    if value < 1000:
        return f"{value:.1f} ms"
    seconds = value / 1000
    return f"{seconds:.2f} s" if seconds < 120 else f"{int(seconds) // 60} min {int(seconds) % 60} s"
