"""Llama and its like: RMS norms before, rotary embedding, shared key heads, a gated MLP."""

from .family import Family, Place, Projections

FAMILY = Family(
    blocks="layers",
    attention="self_attn",
    q=Place("self_attn.q_proj"),
    k=Place("self_attn.k_proj"),
    v=Place("self_attn.v_proj"),
    o=Place("self_attn.o_proj"),
    up=Place("mlp.up_proj"),
    down=Place("mlp.down_proj"),
    gate=Place("mlp.gate_proj"),
    norms=("input_layernorm", "post_attention_layernorm"),
    pre=True,
    activation="hidden_act",
    final="norm",
    rotary=True,
)

ATTENTIONS = (
    Projections(kinds=("LlamaAttention",), q=Place("q_proj"), k=Place("k_proj"), v=Place("v_proj"), o=Place("o_proj"), rotary=True),
)
