"""Find the code that a user meant: models write German as de, deu_Latn or de_DE, and people also as German."""

from __future__ import annotations

import re
from collections.abc import Collection

from clearhead.config.settings import nearest

# An English name, then the codes of ISO 639 that models use, those of the main variety included.
LANGUAGE_NAMES = """
Afrikaans af afr|Albanian sq sqi als|Amharic am amh|Arabic ar ara arb|Armenian hy hye|Azerbaijani az aze azj
Basque eu eus|Belarusian be bel|Bengali bn ben|Bosnian bs bos|Bulgarian bg bul|Burmese my mya|Catalan ca cat
Chinese zh zho cmn|Croatian hr hrv|Czech cs ces|Danish da dan|Dutch nl nld|English en eng|Esperanto eo epo
Estonian et est ekk|Finnish fi fin|French fr fra|Galician gl glg|Georgian ka kat|German de deu ger|Greek el ell
Gujarati gu guj|Hausa ha hau|Hebrew he heb iw|Hindi hi hin|Hungarian hu hun|Icelandic is isl|Igbo ig ibo
Indonesian id ind|Irish ga gle|Italian it ita|Japanese ja jpn|Kannada kn kan|Kazakh kk kaz|Khmer km khm
Korean ko kor|Kurdish ku kur kmr|Kyrgyz ky kir|Lao lo lao|Latvian lv lav lvs|Lithuanian lt lit|Macedonian mk mkd
Malay ms msa zsm|Malayalam ml mal|Maltese mt mlt|Marathi mr mar|Mongolian mn mon khk|Nepali ne nep npi
Norwegian no nor nob nno nb nn|Pashto ps pus pbt|Persian fa fas pes|Polish pl pol|Portuguese pt por|Punjabi pa pan
Romanian ro ron|Russian ru rus|Serbian sr srp|Sinhala si sin|Slovak sk slk|Slovenian sl slv|Somali so som
Spanish es spa|Swahili sw swa swh|Swedish sv swe|Tagalog tl tgl|Tajik tg tgk|Tamil ta tam|Tatar tt tat|Telugu te tel
Thai th tha|Turkish tr tur|Turkmen tk tuk|Ukrainian uk ukr|Urdu ur urd|Uzbek uz uzb uzn|Vietnamese vi vie
Welsh cy cym|Wolof wo wol|Xhosa xh xho|Yoruba yo yor|Zulu zu zul
"""
SAME = {name: {*line.lower().split()} for line in re.split(r"[|\n]", LANGUAGE_NAMES) for name in line.lower().split()}
MAX_SHOWN = 3


def did_you_mean(code: str, known: Collection[str]) -> str:
    """Return `; did you mean deu_Latn?`: codes of the same language, else the code that is spelled most like it."""
    language = re.split(r"[-_ ]", code.lower())[0]
    wanted = SAME.get(language, {language})
    found = [each for each in known if re.split(r"[-_]", each.lower())[0] in wanted]
    exact = [each for each in found if each.lower() == code.lower()] or found
    if not exact:
        return nearest(code, list(known))
    return f"; did you mean {' or '.join(sorted(exact)[:MAX_SHOWN])}?"
