"""A package with every form in which a function is compiled or an op registered.

`numerics-gate scan` reads it and never imports it. After a comment that begins with "listed:" comes
a line that must be listed, as its kind, form and function; every other line must not be.
"""

import a_dependency_that_is_not_installed

raise ImportError("this package must not be imported", a_dependency_that_is_not_installed)
