"""Peers side by side: each module measures one thing, prints a table and writes results/NAME.json."""
