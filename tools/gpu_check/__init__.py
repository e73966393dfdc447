"""What a machine with a GPU must show, in ten minutes: is it right, where does the time go, does the trainer run.

`python -m tools.gpu_check` is the only entry: it starts each stage in a process of its own, with its own time limit, so that
one that fails or hangs takes no other with it. A stage tells facts (`facts`), a line each; `report` makes JSON and a page.
"""
