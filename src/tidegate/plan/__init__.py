"""Planning: which way of serving gives the most goodput on given hardware, and what bounds it. Needs no GPU."""
