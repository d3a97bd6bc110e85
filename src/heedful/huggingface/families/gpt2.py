"""GPT-2: norms before, query, key and value in one transposed matrix."""

from .family import Family, Place

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
