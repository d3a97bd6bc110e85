"""OPT: causal, query, key and value apart."""

from .family import Place, Projections

ATTENTIONS = (Projections(kinds=("OPTAttention",), q=Place("q_proj"), k=Place("k_proj"), v=Place("v_proj"), o=Place("out_proj")),)
