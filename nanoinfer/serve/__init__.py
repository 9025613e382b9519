"""`nanoinfer serve`: an HTTP server that speaks OpenAI's API. It needs the extra `serve`; `AsyncLLM` does not."""
