"""BERT and its like: norms after the sums, query, key and value apart."""

from .family import Family, Place, Projections

FAMILY = Family(
    blocks="encoder.layer",
    attention="attention.self",
    q=Place("attention.self.query"),
    k=Place("attention.self.key"),
    v=Place("attention.self.value"),
    o=Place("attention.output.dense"),
    up=Place("intermediate.dense"),
    down=Place("output.dense"),
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    pre=False,
    activation="hidden_act",
)

ATTENTIONS = (
    Projections(
        kinds=tuple(f"{like}SelfAttention" for like in ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra")),
        q=Place("query"),
        k=Place("key"),
        v=Place("value"),
        o=Place("..output.dense"),
    ),
    Projections(
        kinds=tuple(f"{like}CrossAttention" for like in ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra")),
        q=Place("query"),
        k=Place("key"),
        v=Place("value"),
        o=Place("..output.dense"),
        other="encoder_hidden_states",
    ),
)
