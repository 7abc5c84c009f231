"""Moves before scheduling: inside a layer (CoCoNet, section 3) collectives are split, passed by pointwise work, and
chunked; across the turns of a loop they are made earlier, later, or once.

They act on the module after partitioning and before layouts and fusion are decided; what order the
result runs in is the business of the plan that follows.
"""
