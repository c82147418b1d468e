"""``numerics-gate``: does a norm keep the numerics contract on this machine?"""
