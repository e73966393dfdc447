"""`parallel-rl verify`: the law of any loss from the command line, on a laptop or inside a job."""
