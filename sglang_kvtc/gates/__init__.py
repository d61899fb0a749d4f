"""Gates: how much a token's K and V will matter, told from the hidden state that enters attention."""
