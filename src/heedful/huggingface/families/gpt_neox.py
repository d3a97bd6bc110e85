"""GPT-NeoX: query, key and value of each head side by side in one matrix, the first dims of a head turned."""

from .family import Place, Projections

ATTENTIONS = (
    Projections(
        kinds=("GPTNeoXAttention",),
        q=Place("query_key_value", 0, 3, by_head=True),
        k=Place("query_key_value", 1, 3, by_head=True),
        v=Place("query_key_value", 2, 3, by_head=True),
        o=Place("dense"),
        cache="layer_past",
        rotary=True,
    ),
)
