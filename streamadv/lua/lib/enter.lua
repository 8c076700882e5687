-- enter(spec, holder): make sure that a group without a tombstone is open, and opened with this size. It is opened
-- if need be; if its first caller had withdrawn it, `holder` takes it over.
-- KEYS  group, open, groups, ledger, trainer, sizes
-- Returns its number of slots, and whether this call opened it or took it over; or nil, false and a refusal: see
-- `open_group`, {'mismatch', size}, or {'broken'} if its hash is not what the scripts wrote.
local function enter(spec, holder)
  local group = redis.pcall('HMGET', keys.group, 'size', 'slots', 'unfilled', 'slot_bytes', 'epoch')
  for i = 1, 5 do
    if group.err or (group[1] and not string.match(group[i] or '', '^%-?%d+$')) then return nil, false, {'broken'} end
  end
  if not group[1] then
    local refused = open_group(spec)
    if refused then return nil, false, refused end
    return spec.slots, true
  end
  if group[1] ~= spec.size then return nil, false, {'mismatch', group[1]} end
  if not is_withdrawn(keys.group) then return tonumber(group[2]), false end
  local trainer = redis.call('HMGET', keys.trainer, 'epoch', 'version')
  redis.call('HSET', keys.group, 'holders', holder, 'epoch', trainer[1] or '0', 'version', trainer[2] or '0')
  redis.call('ZADD', keys.open, string.format('%.17g', now_ms() + spec.deadline_ms), spec.id)
  play(spec.producer)
  return tonumber(group[2]), true
end
