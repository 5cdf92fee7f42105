"""Messages to text, keys, and the token stream to reasoning, text and tool calls."""
