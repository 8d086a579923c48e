"""Imported last by the process that ranks are forked from: what it holds is no garbage, and is shared, not copied.

A collection in a forked process would write to every object, and so copy every page.
"""

import gc

gc.collect()
gc.freeze()
