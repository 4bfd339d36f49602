"""One file per `forewarn` command: `configure(parser)` and `run(arguments, config)`. Thin: the work is elsewhere."""
