"""Errata: what the sources say that is wrong, vague or incomplete, one line for each; every item needs a row in the ledger.

An experiment names the items that it settles in `ERRATA`. 000 is the notes on growing attention, 001 the notes on rank loss, 002 the course notes on attention, 003 the
derivative of an attention block; 001.P1 to 001.P4 are the four "problems in the papers" that 001 ends with.
"""

from __future__ import annotations

ITEMS = {
    "000.1": "B = grad_S L + X W_O W_K^T X^T has another projection, the other sign and no scale.",
    "000.2": "X^+ = (X^T X)^-1 X^T is taken of any X.",
    "000.3": "The truncated SVD of Z minimises |B - X Z X^T| among matrices of low rank.",
    "000.4": "One X stands for a batch of texts.",
    "000.5": "All of dL/dS is to be followed, row constants and key biases too.",
    "000.6": "Masked entries count in the norms.",
    "000.7": "The constrained problem and the regression with a step eta are one.",
    "001.1": "Q = W^Q X does not fit the shapes, W_QS stands for W_QK, and the output bias is left out.",
    "001.2": "The path theorem's products, written in the order of the layers, do not sum to the network.",
    "001.3": "The bias of the path theorem is one vector 1b^T whatever the input.",
    "001.4": "The residual's logits are written without biases; which of them matter is not said.",
    "001.5": "The composite norm sqrt(|A|_1 |A|_inf) is used as a norm.",
    "001.6": "The residual is defined by a minimiser, without saying that it depends on the norm.",
    "001.7": "The bound on the residual is stated with beta alone.",
    "001.8": "Equations (9) and (10) bound P R entry by entry.",
    "001.9": "The residual of the input is taken to be below 1.",
    "001.10": "P can be replaced by a matrix of rank O(log n), with an error relative to |P w|.",
    "001.11": "The table of complexities counts tokens alone.",
    "001.12": "LayerNorm changes nothing of the argument, as a map of the columns.",
    "001.P1": "Problem 1: the proof in A.1.",
    "001.P2": "Problem 2: can a norm without the triangle inequality stand for a distance?",
    "001.P3": "Problem 3: why should the residual of the input be smaller than 1?",
    "001.P4": "Problem 4: the conclusion, that softmax loses rank because it has low rank.",
    "002.13": "A small beta makes softargmax hard, a large one soft.",
    "002.14": "(e): an edited key adds one constant to all logits.",
    "002.15": "(e), (f): an edited key changes one output, an edited query all of them.",
    "002.16": "(e): zero-mean noise on a key leaves the mean of the attention as it is.",
    "002.17": "(e), (f): the change is small; how large it is exactly is not said.",
    "002.18": "K^(i) = V W_v, and self-attention is attention of equal dimensions.",
    "002.19": "Identity, permutation and convolution layers come from a very small beta; a neighbourhood makes one head a convolution.",
    "003": "The derivative of softmax(l x^T A^T B y) C x is that of a transformer's attention.",
}


def source(item: str) -> str:
    """The source of an item.

    >>> source("001.P2")
    '001'
    """
    return item.partition(".")[0]
