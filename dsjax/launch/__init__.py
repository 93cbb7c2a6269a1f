"""Several processes: which cluster this process belongs to, joining it; `dsjax launch`, which supervises them.

The supervisor of a node (`run`) has workers (`workers`, `output`) and a health check (`node`).  Node 0's
leads (`supervisor`; `hangs` and `budget` are what it judges by) over links to the others (`nodes`; their
side is `follower`).
"""
