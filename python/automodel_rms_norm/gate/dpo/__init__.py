"""``numerics-gate dpo``: does a DPO job with this norm start at ln 2?"""
