"""What may be written to a terminal."""

# What a terminal takes for orders, but for new lines and tabs.
_ORDERS = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t")


def without_orders(text: str) -> str:
    """Return the text without what a terminal takes for orders: a model, or a document that it read, may write some."""
    return text.translate(_ORDERS)
