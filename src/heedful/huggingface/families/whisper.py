"""Whisper: BART's attention, with no bias on its keys."""

from dataclasses import replace

from .bart import ATTENTIONS as BART

ATTENTIONS = (replace(BART[0], kinds=("WhisperAttention",)),)
