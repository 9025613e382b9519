"""`nanoinfer serve`: an HTTP server that speaks OpenAI's API. It needs the extra packages of `nanoinfer[serve]`.

Only `command` may be imported without them: the command line reads its options from there.
"""
