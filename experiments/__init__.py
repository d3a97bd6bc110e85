"""Claims of the sources, each measured by one file: s<source>_<claim>.py.

To add one, write such a file: its docstring is the claim in one line, then the source's words and figure; it gives
    VERDICT                   "holds", "holds if ..." or "wrong: " and what is true instead
    ERRATA                    the items of errata.py that it settles, such as ("001.10",); () where there are none
    measure(size) -> dict     the numbers, for size tiny (seconds, in the tests), small (minutes) or full
    holds(numbers) -> bool    whether they confirm our verdict
    figure_of(numbers) -> str our figure in one line, for the ledger
    draw(numbers, path)       the figure as a PNG
`python -m experiments [name ...] [--size small]` runs them, writes results/NAME.json and results/NAME.png, and then the ledger docs/claims.md.
"""
