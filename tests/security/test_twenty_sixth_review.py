"""What a stranger's request costs while its bytes come one by one, and another user who is where ours is
looked for: at a server's second address, behind runs/latest.
"""

from __future__ import annotations
