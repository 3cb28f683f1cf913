"""Training loops, right and faulty, that judge the audit: files that run by themselves, and a command.

    python corpus/faulty/clip_each_microbatch.py    # one of them, on its own
    python -m corpus clip_each_microbatch            # what the audit finds in it
    python -m corpus --check                         # all of them, compared with corpus/table.jsonl

A loop's docstring is its header, which is read without running the file: a title, an empty line, and fields.

    kind: right or faulty
    engine: jax, tensorflow or torch
    needs: libraries beyond the engine, if any
    author: one of those who wrote loops without knowing the audit
    changes: of a faulty one, what the fault changes: update, data (what the loop is given), or report
    quantity: of a faulty one that changes an update, the first quantity that differs (`corpus.loops.Quantity`)
    says: one sentence
    meant: statements that the call needs, if an expression is not enough
    call: the arguments of the audit's call, in the names of the script; none if it cannot be stated

A line `# ---- training ----` stands where the loop begins: it and the rest of its block are audited. The statement of a
fault ends with the comment `# fault`.
"""
