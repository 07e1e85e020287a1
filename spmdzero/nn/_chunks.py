"""How many rows of logits there are at once."""

# Adding a chunk's gradient of the weight to the sum of those before reads and writes 8 bytes an
# element. A product over this many rows takes a TPU as long: 962 rows on v5e, 2,240 on v6e.
_MOST = 2048
_TILE = 128


def chunks(rows: int, chunk: int | None) -> list[slice]:
    """Consecutive slices of `rows`, each of `chunk` but the last; None chooses.

    It chooses half of the rows in whole tiles of 128, and 2,048 at most: measured by libtpu's
    estimate for v5e, GPT-2's head (4,096 rows, 768 x 50,304, bf16) takes 11.6 M cycles and
    505 MB in halves, 12.9 M and 379 MB in quarters, and 19.9 M and 969 MB with its logits.
    """
    if chunk is None:
        half = -(-rows // 2)
        chunk = min(_MOST, -(-half // _TILE) * _TILE)
    return [slice(first, min(first + chunk, rows)) for first in range(0, rows, max(chunk, 1))]
