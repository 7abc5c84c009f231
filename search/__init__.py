"""The search for a better strategy: Algorithm 1 of the paper, and the search around it."""

from disco_hlo.search.api import Finalist as Finalist
from disco_hlo.search.api import Improvement as Improvement
from disco_hlo.search.api import Progress as Progress
from disco_hlo.search.api import SearchResult as SearchResult
from disco_hlo.search.api import SearchSettings as SearchSettings
from disco_hlo.search.run import search as search
