-- End a group whose hash is broken: what can be read of its members is dead, the rest was never counted as open.
-- Returns the outcome and no data source.
local function end_broken(keys, id, policy)
  local flat = redis.pcall('HGETALL', keys.group)
  local held, highest, there, group = 0, -1, {}, {}
  for i = 1, flat.err and 0 or #flat, 2 do
    local index = string.match(flat[i], '^%d%d?%d?%d?$') and tonumber(flat[i])
    if index then
      there[index], highest = flat[i + 1] == 'p' and '2' or '1', math.max(highest, index)
      local _, bytes, key = member_fields(flat[i + 1])
      if key then
        held = held + 1
        redis.call('RPUSH', keys.garbage, key .. ' ' .. bytes)
      end
    else
      group[flat[i]] = flat[i + 1]
    end
  end
  local bitmap = {}
  for index = 0, highest do bitmap[#bitmap + 1] = there[index] or '0' end
  redis.call('DEL', keys.group)
  if redis.call('ZREM', keys.open, id) == 1 then redis.pcall('HINCRBY', keys.ledger, 'groups_open', -1) end
  for _, name in ipairs({'unfilled', 'slot_bytes'}) do
    if not string.match(group[name] or '', '^%d+$') or #group[name] > 15 then group.unfilled = '0' end
  end
  give_back(keys, group)
  if held > 0 then redis.pcall('HINCRBY', keys.ledger, 'open', -held) end
  redis.pcall('HINCRBY', keys.ledger, 'outcome:malformed', 1)
  note_malformed(keys, 'group:' .. id, 'hash', held, 'size, slots or counters are not what was written', '')
  remember_ended(keys, id, 'e', table.concat(bitmap), policy.dedupe_groups)
  return 'malformed', ''
end
