"""The order in which each pipeline rank computes, sends and receives. Nothing here imports torch.

actions      an action, the placement of the virtual stages, a table
orders       the orders of the compute actions, one function a schedule
lowering     adds messages to an order, then the gathering of parameters and the reduction of gradients
simulation   the times of a table; finds tables that can never finish
build        every schedule by its name
"""
