"""The same training under several engines, measured side by side: `hf-dist bench`. See README.md in this folder."""
