"""GPT-2: norms before, query, key and value in one transposed matrix."""

from .family import Family, Place, Projections

FAMILY = Family(
    blocks="h",
    attention="attn",
    q=Place("attn.c_attn", 0, 3),
    k=Place("attn.c_attn", 1, 3),
    v=Place("attn.c_attn", 2, 3),
    o=Place("attn.c_proj"),
    up=Place("mlp.c_fc"),
    down=Place("mlp.c_proj"),
    norms=("ln_1", "ln_2"),
    pre=True,
    activation="activation_function",
    final="ln_f",
)

ATTENTIONS = (
    Projections(  # the first whose modules are there
        kinds=("GPT2Attention",),
        q=Place("q_attn"),
        k=Place("c_attn", 0, 2),
        v=Place("c_attn", 1, 2),
        o=Place("c_proj"),
        other="encoder_hidden_states",
        other_mask="encoder_attention_mask",
    ),
    Projections(
        kinds=("GPT2Attention",), q=Place("c_attn", 0, 3), k=Place("c_attn", 1, 3), v=Place("c_attn", 2, 3), o=Place("c_proj")
    ),
)
