"""Ground floor: flat arithmetic, collectives, optimizers. Imports only torch."""
