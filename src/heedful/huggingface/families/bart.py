"""BART: an encoder and a decoder that reads it by cross attention of the same class."""

from .family import Place, Projections

ATTENTIONS = (
    Projections(
        kinds=("BartAttention", "MBartAttention", "PegasusAttention", "MarianAttention"),
        q=Place("q_proj"),
        k=Place("k_proj"),
        v=Place("v_proj"),
        o=Place("out_proj"),
        other="key_value_states",
    ),
)
