"""Planned against hand-tuned layouts, priced on paper."""
