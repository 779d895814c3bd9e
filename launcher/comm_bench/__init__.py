"""`xds bench comm`: start -> ranks -> for each of cases: check, time; link: what there is to compare with."""
