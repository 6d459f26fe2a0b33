"""`kvpact parity`."""
def parity() -> None:
    """x"""
