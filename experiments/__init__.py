"""Claims of the sources, each measured by one file: s<source>_<claim>.py.

To add one, write such a file: its docstring is the claim in one line, then the source's words and figure; it gives
    measure(size) -> dict     the numbers, for size tiny (seconds, in the tests), small (minutes) or full
    holds(numbers) -> bool    whether they say what the claim says
    draw(numbers, path)       the figure as a PNG
`python -m experiments [name ...] [--size small]` runs them and writes results/NAME.json and results/NAME.png.
"""
