"""Questions about facts in long contexts, asked of the model that comes along or of another one."""
