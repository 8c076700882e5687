-- The archive has all kept groups up to an entry: move its mark, and forget those for which there is no room.
-- KEYS  void, kept, ledger, trainer, garbage, admission
-- ARGV  entry up to which the archive had them before ('' = none), entry up to which it has them now
-- Returns  the entry up to which an archive has them: any but the second argument = the mark was not where it was read
-- include announce
-- include trim
local mark = redis.call('HGET', keys.trainer, 'archived') or ''
if mark == ARGV[1] then
  mark = ARGV[2]
  redis.call('HSET', keys.trainer, 'archived', mark)
end
trim(redis.call('HGET', keys.trainer, 'keep') or '0')
return mark
