-- The archive has all kept groups up to an entry: move its mark, and forget those for which there is no room.
-- KEYS  void, kept, ledger, trainer, garbage, admission
-- ARGV  entry up to which the archive had them before ('' = none), entry up to which it has them now, the group of that
--       entry ('' = it has read none)
-- Returns  the entry up to which an archive has them: any but the second argument = the mark was not where it was read, or
--          the server has lost that entry, which may end again
-- include trim
local mark = redis.call('HGET', keys.trainer, 'archived') or ''
local function is_there(entry)
  local kept = redis.call('XRANGE', keys.kept, entry, entry)[1] or {nil, {}}
  for i = 1, #kept[2], 2 do
    if kept[2][i] == 'group_id' and kept[2][i + 1] == ARGV[3] then return true end
  end
end
if mark == ARGV[1] and (ARGV[3] == '' or is_there(ARGV[2])) then
  mark = ARGV[2]
  redis.call('HSET', keys.trainer, 'archived', mark)
end
trim(redis.call('HGET', keys.trainer, 'keep') or '0')
return mark
