"""T5: no scale, no biases, a learned bias by distance that the first layer computes for all."""

from .family import Place, Projections

ATTENTIONS = (
    Projections(
        kinds=("T5Attention",),
        q=Place("q"),
        k=Place("k"),
        v=Place("v"),
        o=Place("o"),
        mask="mask",
        other="key_value_states",
        biased=True,
        size="d_kv",
    ),
)
