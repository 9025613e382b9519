"""What the text of an answer says: what was thought, what is answered, and which tools are called."""
