"""DistilBERT: BERT's attention under other names."""

from .family import Place, Projections

ATTENTIONS = (
    Projections(kinds=("DistilBertSelfAttention",), q=Place("q_lin"), k=Place("k_lin"), v=Place("v_lin"), o=Place("out_lin")),
)
