"""The picture of a parallel plan: the records of a run enter, and a standalone SVG or HTML page leaves.

`picture_data` collects the facts of a job from its records. `picture_layout` lays them out as
`drawing_parts_and_text_fit`, and `picture_file` writes these. `rankless plan --picture` calls it. Decision 0037 has the
reasons.
"""
