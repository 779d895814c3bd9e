"""Ground floor: flat arithmetic, collectives, native kernels. Imports only torch."""
