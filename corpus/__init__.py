"""Training loops, right and faulty, that judge stepcheck.

    python corpus/faulty/clip_each_microbatch.py    # a loop runs by itself
    python -m corpus clip_each_microbatch           # prints what stepcheck finds in it
    python -m corpus --check                        # compares all loops with corpus/table.jsonl

The docstring of a loop is its header, which is read without running the file. A title and an empty
line stand first, and then fields:

    kind: right or faulty
    engine: jax, tensorflow or torch
    needs: libraries beyond the engine, if any
    process: own, if the loop sets what a process can set only once, as its number of devices
    author: suite (the tests), posted (a public question), or who wrote it without knowing it
    changes: what the fault changes: update, data (that the loop is given) or report
    quantity: the first quantity of the update that differs (`corpus.loops.Quantity`)
    also: quantities that other faults of the loop change, in later stages
    says: one sentence
    meant: statements that the call needs, if an expression is not enough
    call: the arguments of `stepcheck.watch`, in the script's names; none if there is no such call
    printed: the losses that the loop prints, as arguments of `report.printed`

A right loop has no `changes`. A `quantity` goes with `changes: update`; and PRINTED with `changes:
report`, if the losses are given to the report.

The loop begins at the line `# ---- training ----`: stepcheck watches the rest of that block. The
statement of a fault has the comment `# fault` at the end of a line.

Faults that are edits of a right loop stand beside it, in `corpus/right/NAME.edits.toml`:

    [[edit]]
    name = "penalty_forgotten"      # the loop's name is NAME+penalty_forgotten
    says = "The penalties of the layers are not added."
    changes = "update"              # and quantity, as in a header
    quantity = "PENALTY"
    replace = [[" + sum(model.losses)", ""]]

Each old part must occur exactly once below the header, after the replacements before it. The lines
of the fault are the statements that have new text, or lost some. `also` is a list; `author` is that
of the right loop, if none is given.
"""
