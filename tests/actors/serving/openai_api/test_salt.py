"""The salts of the prefix cache, which keep teams apart whatever a client asks for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.serving.openai_api.admission import Anybody
from raytide.actors.serving.openai_api.server import _salt

TEXTS = st.text(alphabet="a1:/'", max_size=6)


class Member(Anybody):
    is_known = True

    def __init__(self, team: str) -> None:
        self.team = team


@given(TEXTS.filter(bool), TEXTS, TEXTS.filter(bool), TEXTS)
def test_no_salt_of_a_team_is_one_of_another(team: str, asked: str, other: str, other_asked: str) -> None:
    is_same = (team, asked) == (other, other_asked)
    assert (_salt(asked, Member(team)) == _salt(other_asked, Member(other))) == is_same
    assert _salt(asked, Member(team)) != _salt(other_asked, Anybody())
    assert _salt(None, Member(team)) == _salt("", Member(team)) != _salt(None, Anybody()) == ""
